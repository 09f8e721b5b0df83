"""The check `tf-dgc-run --verify`: one worker and N compute the same of a script."""

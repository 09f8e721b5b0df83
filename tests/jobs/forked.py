"""What `test_forks` starts; it says first what it is."""

import json
import os
import signal
import sys
import time

what = sys.argv[1]
is_fork = "tensorflow" in sys.modules
told = {"fork": is_fork, "pid": os.getpid(), "own": os.environ.get("OWN")}
print(json.dumps(told | {"folder": os.getcwd(), "name": __name__}), flush=True)
if what == "raises":
    raise ValueError("as it should")
if what == "stops":
    os.kill(os.getpid(), signal.SIGSTOP)
    what = "0"
if what == "waits":
    time.sleep(100)
sys.exit(int(what))

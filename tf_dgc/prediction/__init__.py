"""Prediction of what a step costs with each strategy, and the choice of one by it."""

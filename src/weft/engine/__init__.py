"""The engine process's code: schedules, prefills, decodes and samples token ids; `engine.py` has the main loop."""

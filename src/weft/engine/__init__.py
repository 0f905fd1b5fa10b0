"""The engine process: schedules, prefills, decodes, samples. `host.py` runs the loop, `Engine.turn` is one iteration."""

"""Models: `resolve` turns a name into a folder, `loader` loads that folder, `adapter` runs the model for the engine."""

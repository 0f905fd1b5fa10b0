"""Models: `resolve` turns a name into a folder, `loader` a folder into a loaded model. Imports nothing, so this is free."""

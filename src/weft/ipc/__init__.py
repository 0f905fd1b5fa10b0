"""Between the front and its engines: the messages, the channel that carries them, and what a request may ask for."""

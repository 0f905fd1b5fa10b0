"""The Responses dialect: bodies into generations, deltas into responses and their events, and the store of responses."""

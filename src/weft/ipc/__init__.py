"""Communication between the front process and its engine processes: messages, the channel, and limits of requests."""

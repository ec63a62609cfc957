"""How two stages are joined: channels in one process, topics between processes."""

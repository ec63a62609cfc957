"""Small tools for asyncio that the standard library lacks."""

"""`minimind serve`: an OpenAI-compatible server and a chat page, an optional extra.

Only `cli/` imports it, and nothing else loads starlette or uvicorn.
"""

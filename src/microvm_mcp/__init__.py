"""Private Linux machines in microVMs, over MCP and HTTP."""

__version__ = "0.1.0"

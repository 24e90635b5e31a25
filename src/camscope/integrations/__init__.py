"""Where maps meet other tools: training loops, loggers, FiftyOne, the MCP server."""

"""One result, shown as tables on the terminal, as JSON and as an HTML page."""

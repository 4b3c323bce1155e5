"""Shell scripts: words and lines, values of variables, the launch that they make."""

"""The run directory of a deployment: its files, recorded state, requests to the launcher, orphans."""

"""How elasticd gets onto machines. Not part of what is installed: `python -m deploy.install`, run in the source tree."""

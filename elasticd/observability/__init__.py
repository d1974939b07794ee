"""How the project speaks of itself: structured logs now; metrics and events later. Imports nothing else of elasticd but errors."""

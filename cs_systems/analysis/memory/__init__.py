"""Memory of a snapshot by allocation: when it lived, its phase and layer, its line of code, its category. No torch."""

"""Random draws of private training: samples, noise, and their secure forms."""

"""Probes of tuning: what the choice of tiles and kernels was made by; no page is made of them."""

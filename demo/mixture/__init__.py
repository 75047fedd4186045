"""The demo model with experts, latent attention and gated delta layers: trained on the bundled model's tasks."""

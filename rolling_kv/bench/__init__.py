"""Measuring on the user's own machine and model: profiles, and how near a policy comes to full prefill."""

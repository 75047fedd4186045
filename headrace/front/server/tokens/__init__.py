"""Token in, token out: requests rendered to token ids, generation on ids alone, ids turned back into answers."""

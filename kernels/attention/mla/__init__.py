"""MLA decode: attention of few queries to a cache of latent keys, which are values, too."""

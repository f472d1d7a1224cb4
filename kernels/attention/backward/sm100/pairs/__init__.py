"""The Blackwell backward by pairs of CTAs that exchange dS."""

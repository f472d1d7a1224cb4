"""The ladder of sm_100a."""

"""The ladder of sm_90a."""

"""Small models, pipelines, and data for tests, and ways to run them in other processes."""

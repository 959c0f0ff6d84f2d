"""What is benchmarked: typed recipes, data sources, suites and published reference results."""

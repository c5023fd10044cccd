"""A verification for machines and people: JUnit XML, a job summary, a page, a card beside the shards."""

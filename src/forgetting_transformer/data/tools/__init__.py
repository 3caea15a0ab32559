"""What is done to whole corpora by hand, fetching LongCrawl64 and verifying copies, and its progress on a terminal."""

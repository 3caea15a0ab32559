"""Tools for whole corpora: fetching LongCrawl64, verifying copies, and progress on a terminal."""

"""What the tests of crashes and faults share: actors under test, and the ways to disturb them."""

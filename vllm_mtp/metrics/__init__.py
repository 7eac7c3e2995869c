"""What speculation does, for people: counts, a log line, Prometheus, an alarm."""

"""What the tests run on ranks: functions that can be imported by name."""

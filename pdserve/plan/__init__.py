"""Recipe + nodes -> Plan. Pure: no I/O, no clock, no environment."""

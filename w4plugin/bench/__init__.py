"""Speed on one's own device, against the dense library and over the roofline: `w4plugin bench` and tools/bench."""

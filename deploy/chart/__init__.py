"""What the Helm chart's values are, and the files generated from that: values.yaml, values.schema.json, README.md."""

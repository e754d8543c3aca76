"""An S3 server, as payloads and the commit record both reach it."""

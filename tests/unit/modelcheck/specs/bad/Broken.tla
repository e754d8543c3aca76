---- MODULE Broken ----
Init == (
====

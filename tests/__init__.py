"""The tests of hocket. The folders mirror those of src/hocket."""

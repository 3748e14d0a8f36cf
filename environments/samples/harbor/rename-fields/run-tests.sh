#!/bin/bash
cmp /app/people.csv "$TEST_DIR/people.csv"

#!/bin/bash
cd /app/reports
for file in *.txt; do echo "$file $(grep -c ^ERROR "$file")"; done > /app/errors.txt

#!/bin/bash
cd /app/logs
for file in *.log; do echo "$file $(grep -c ^ERROR "$file")"; done > /app/errors.txt

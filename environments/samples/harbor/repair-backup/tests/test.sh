#!/bin/bash
rm -rf /app/backup
echo three > '/app/data/a b  c.txt'
printed=$(bash /app/backup.sh)
if [ "$printed" = 3 ] && diff -r /app/data /app/backup; then
    echo '{"reward": 1.0}' > /logs/verifier/reward.json
else
    echo '{"reward": 0.0}' > /logs/verifier/reward.json
fi

#!/bin/bash
# Half of the reward for each: one line per file, and the right numbers.
lines=0
numbers=0
[ "$(cut -d' ' -f1 /app/errors.txt | tr '\n' ' ')" = "mail.txt shop.txt web.txt " ] && lines=1
cmp -s /app/errors.txt /tests/expected.txt && numbers=1
[ $lines = 1 ] && [ $numbers = 1 ] && reward=1.0
[ $lines = 1 ] && [ $numbers = 0 ] && reward=0.5
echo "${reward:-0.0}" > /logs/verifier/reward.txt

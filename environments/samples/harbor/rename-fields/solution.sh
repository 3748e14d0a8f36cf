#!/bin/bash
sed -i '1s/,mail$/,email/' /app/people.csv

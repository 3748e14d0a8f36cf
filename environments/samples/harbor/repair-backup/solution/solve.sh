#!/bin/bash
cat > /app/backup.sh <<'END'
#!/bin/bash
cd /app/data
mkdir -p /app/backup
n=0
for file in *; do
    cp "$file" /app/backup/ && n=$((n + 1))
done
echo $n
END

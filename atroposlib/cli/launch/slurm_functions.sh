# Functions of the jobs of one run, sourced by each and by `submit.sh`.
# $RUN_DIR/addresses/NAME holds the address of an instance; $RUN_DIR/done/NAME marks a job that has ended with status 0.
# The address of a node is its first IP address; set NODE_ADDRESS in the run file's `setup` for another one. The hub's data
# are on its node's own disk, below LOCAL_DISK (/var/tmp).
# A job defines PROGRAM (a function that becomes its program), CONNECT (sets the addresses), USES (names of servers) and
# AT_END (a function called before the run ends).

# is_ready NAME READY: READY is a path that answers 200, `port`, `exit`, or `-`.
is_ready() {
    local url
    case $2 in
        -) return 0 ;;
        exit) test -e "$RUN_DIR/done/$1"; return ;;
    esac
    url=$(cat "$RUN_DIR/addresses/$1" 2>/dev/null) || return 1
    if [ "$2" = port ]; then
        url=${url#*://}
        timeout 5 bash -c "exec 3<>/dev/tcp/${url%:*}/${url#*:}" 2>/dev/null
    else
        curl -fs -m 5 -o /dev/null "$url$2"
    fi
}

# wait_for NAME READY: wait for an instance that this job needs.
wait_for() {
    until is_ready "$1" "$2"; do sleep 2; done
}

own_address() {
    echo "$SCHEME://${NODE_ADDRESS:-$(hostname -I | cut -d " " -f 1)}:$PORT"
}

address() {
    cat "$RUN_DIR/addresses/$1"
}

addresses_in_use() {
    local name
    for name in $USES; do address "$name" || return 1; done
}

# end_program PID: TERM, and KILL to one that has not ended after END_S seconds (20; Slurm itself waits for 30).
end_program() {
    local since=$SECONDS
    kill -TERM "$1" 2>/dev/null || true
    while kill -0 "$1" 2>/dev/null && [ $((SECONDS - since)) -lt "${END_S:-20}" ]; do sleep 0.2; done
    kill -KILL "$1" 2>/dev/null || true
    wait "$1" 2>/dev/null || true
}

# run_part NAME READY TIMEOUT RESTART MAX_RESTARTS: run PROGRAM; start it again when it fails, when it does not answer
# for TIMEOUT seconds, and when a server in USES has moved to another host (Slurm has queued its job again).
run_part() {
    local name=$1 ready=$2 timeout=$3 restart=$4 max_restarts=$5
    local num_failed=0 status moved started answered checked in_use now child
    mkdir -p "$RUN_DIR/addresses" "$RUN_DIR/done"
    if [ -n "${PORT:-}" ]; then
        own_address > "$RUN_DIR/addresses/.$name"
        mv "$RUN_DIR/addresses/.$name" "$RUN_DIR/addresses/$name"
    fi
    while true; do
        CONNECT
        in_use=$(addresses_in_use)
        moved=no started=$SECONDS answered=$SECONDS checked=$SECONDS
        PROGRAM &
        child=$!
        trap 'end_program $child; exit 143' TERM INT
        while kill -0 $child 2>/dev/null; do
            sleep 1 &
            wait $! || true
            [ $((SECONDS - checked)) -ge 5 ] || continue
            checked=$SECONDS
            if [ "$ready" = exit ] || is_ready "$name" "$ready"; then answered=$SECONDS; fi
            if [ $((SECONDS - answered)) -gt "$timeout" ]; then
                echo "$name did not answer for $timeout s" >&2
                kill -KILL $child 2>/dev/null || true
            elif now=$(addresses_in_use) && [ "$in_use" != "$now" ]; then
                echo "a server has moved to another host: $name starts again" >&2
                moved=yes
                end_program $child
                break
            fi
        done
        status=0
        wait $child || status=$?
        trap - TERM INT
        [ $moved = no ] || continue
        if [ $status = 0 ] && [ "$restart" != always ]; then
            touch "$RUN_DIR/done/$name"
            return 0
        fi
        if [ $((SECONDS - started)) -gt 600 ]; then num_failed=0; fi
        if [ "$restart" = never ] || [ $num_failed -ge "$max_restarts" ]; then
            echo "$name ended with status $status after $num_failed restarts" >&2
            return $((status == 0 ? 1 : status))
        fi
        sleep $((num_failed > 4 ? 30 : 2 ** num_failed))
        num_failed=$((num_failed + 1))
        echo "$name ended with status $status; restart $num_failed" >&2
    done
}

# take_data: set DATA_DIR, on this node's disk, with what the hub's last job left in $RUN_DIR/hub. While the data are here,
# $RUN_DIR/hub_node names the node: a job queued again on it continues with them.
take_data() {
    local directory last
    directory=${LOCAL_DISK:-/var/tmp}/atropos-$(id -u)-${RUN_DIR##*/}-$(printf %s "$RUN_DIR" | cksum | cut -d " " -f 1)
    (umask 077 && mkdir -p "$directory")
    if [ -L "$directory" ] || [ ! -O "$directory" ]; then
        echo "$directory belongs to another user; set LOCAL_DISK in the run file's setup" >&2
        return 1
    fi
    last=$(cat "$RUN_DIR/hub_node" 2>/dev/null || true)
    if [ "$last" != "$(hostname)" ]; then
        [ -z "$last" ] || echo "the hub's newest data stay in $last:$directory/hub" >&2
        rm -rf "$directory/hub"
        # save_data was killed between its two renames: the copy is complete.
        if [ ! -d "$RUN_DIR/hub" ] && [ -d "$RUN_DIR/hub.old" ]; then mv "$RUN_DIR/hub.new" "$RUN_DIR/hub"; fi
        [ ! -d "$RUN_DIR/hub" ] || cp -a "$RUN_DIR/hub" "$directory"
        hostname > "$RUN_DIR/hub_node"
    fi
    export DATA_DIR=$directory/hub
}

# save_data: move the hub's data to $RUN_DIR/hub, if they are here.
save_data() {
    [ -d "${DATA_DIR:-}" ] && [ "$(cat "$RUN_DIR/hub_node")" = "$(hostname)" ] || return 0
    rm -rf "$DATA_DIR/ballast" "$RUN_DIR/hub.new" "$RUN_DIR/hub.old"
    if ! cp -a "$DATA_DIR" "$RUN_DIR/hub.new"; then
        echo "the hub's data stay in $(hostname):$DATA_DIR" >&2
        return 0
    fi
    [ ! -d "$RUN_DIR/hub" ] || mv "$RUN_DIR/hub" "$RUN_DIR/hub.old"
    mv "$RUN_DIR/hub.new" "$RUN_DIR/hub"
    rm -rf "$RUN_DIR/hub_node" "$RUN_DIR/hub.old" "${DATA_DIR%/hub}"
}

# is_queued_again: whether Slurm has put this job back into the queue, as after a preemption.
is_queued_again() {
    local restarts
    restarts=$(scontrol show job "$SLURM_JOB_ID" --oneliner 2>/dev/null | grep -o ' Restarts=[0-9]*') || return 1
    [ "${restarts#*=}" -gt "${SLURM_RESTART_COUNT:-0}" ]
}

# end_job STATUS WHAT: called at every end, also by a signal or at the time limit. The run's other jobs end with one that
# fails or whose WHAT is `run`, so that no GPU stays allocated; not if Slurm starts the job again.
end_job() {
    set +e
    trap '' TERM INT
    trap - EXIT
    save_data
    if { [ "$1" != 0 ] || [ "$2" = run ]; } && ! is_queued_again; then
        AT_END
        grep -vx "$SLURM_JOB_ID" "$RUN_DIR/jobs" | xargs -r scancel
    fi
    exit "$1"
}

# begin_submission: refuse while jobs of the run live, or are being submitted.
begin_submission() {
    local mine live
    mkdir -p "$RUN_DIR"
    if ! mkdir "$RUN_DIR/submitting"; then
        echo "another submit.sh submits this run; if none does: rmdir $RUN_DIR/submitting" >&2
        exit 1
    fi
    trap 'rmdir "$RUN_DIR/submitting"' EXIT
    touch "$RUN_DIR/jobs"
    mine=$(squeue --noheader --format=%F --user="$(id -un)")
    if live=$(grep -Fx -f "$RUN_DIR/jobs" <<< "$mine" | sort -u | paste -sd " "); then
        echo "this run has jobs already: $live - end them first: scancel $live" >&2
        exit 1
    fi
    rm -rf "$RUN_DIR/addresses" "$RUN_DIR/done"
    : > "$RUN_DIR/jobs"
    trap 'xargs -r scancel < "$RUN_DIR/jobs"; rmdir "$RUN_DIR/submitting"' EXIT
    ENDS=()
}

# submit PART WHEN TASKS...: the run ends WHEN a task of this part has ended (`afterany`), or has failed (`afternotok`). The
# jobs are held until all are known: one that fails at once ends the others.
submit() {
    local id task
    id=$(sbatch --hold --parsable "$1.sbatch")
    echo "$id" >> "$RUN_DIR/jobs"
    for task in "${@:3}"; do ENDS+=("$2:$id$task"); done
}

# end_submission OPTIONS...: a job ends the others itself; one with these options does so for a job that is killed, or ends
# before its script has begun.
end_submission() {
    local jobs when
    jobs=$(paste -sd , "$RUN_DIR/jobs")
    when=$(IFS="?"; echo "${ENDS[*]}")
    # shellcheck disable=SC2016 # the job replaces them
    sbatch --parsable --dependency="$when" --kill-on-invalid-dep=yes "$@" \
        --wrap='grep -vx "$SLURM_JOB_ID" "$RUN_DIR/jobs" | xargs -r scancel' >> "$RUN_DIR/jobs" ||
        echo "no clean-up job: if a job of this run is killed with SIGKILL, end the others with scancel" >&2
    scontrol release "$jobs"
    trap 'rmdir "$RUN_DIR/submitting"' EXIT
    echo "jobs: $(paste -sd " " "$RUN_DIR/jobs"); logs: $RUN_DIR/"
}

#!/bin/bash
# Both job files against a real Slurm on this one machine, from Debian's packages; as root, on a CPU, in some minutes.
#
#   scripts/slurm/one_node.sh FOLDER     # installs what is missing, starts munge and Slurm, submits, waits, shows, stops
#
# Everything that it writes but the packages is in FOLDER. Of an array each of two tasks measures two cells, and nothing
# when it is submitted again; then two torchruns with a rank each, as two nodes would have them, share training steps.
# The exit status is 0 if there are seven cells and all are ok.
set -euo pipefail
folder=$(realpath -m "${1:?give a folder for configuration, logs and records}")
repository=$(realpath "$(dirname "$0")/../..")
for program in munged slurmctld slurmd sbatch; do
    if ! PATH=$PATH:/usr/sbin type "$program" > /dev/null 2>&1; then
        apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends \
            munge slurmctld slurmd slurm-client
        break
    fi
done
PATH=$PATH:/usr/sbin
mkdir -p "$folder"/{state,spool,log,records}
node=$(hostname -s)
export SLURM_CONF=$folder/slurm.conf
cat > "$SLURM_CONF" << EOF
ClusterName=one
SlurmctldHost=$node(127.0.0.1)
SlurmUser=root
SlurmctldPort=16817
SlurmdPort=16818
AuthType=auth/munge
AuthInfo=socket=$folder/munge.socket
CryptoType=crypto/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
ReturnToService=2
StateSaveLocation=$folder/state
SlurmdSpoolDir=$folder/spool
SlurmctldPidFile=$folder/slurmctld.pid
SlurmdPidFile=$folder/slurmd.pid
NodeName=$node NodeAddr=127.0.0.1 CPUs=$(nproc) State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP OverSubscribe=NO
EOF
head -c 1024 /dev/urandom > "$folder/munge.key"
chmod 400 "$folder/munge.key"
pids=()
stop() { kill "${pids[@]}" 2> /dev/null || true; wait; }
trap stop EXIT
munged --force --foreground --key-file="$folder/munge.key" --socket="$folder/munge.socket" \
    --pid-file="$folder/munge.pid" --seed-file="$folder/munge.seed" --log-file="$folder/log/munge" 2> "$folder/log/munged" & pids+=($!)
sleep 1
slurmctld -D -i > "$folder/log/slurmctld" 2>&1 & pids+=($!)
slurmd -D -N "$node" > "$folder/log/slurmd" 2>&1 & pids+=($!)
for _ in $(seq 60); do
    sinfo --noheader --format=%T 2> /dev/null | grep -q idle && break
    sleep 1
done
sinfo

cd "$repository"
small=(--size tiny --device cpu --warmup 1 --steps 5)
for _ in first again; do  # again, it finds every cell recorded
    sbatch --wait --array=0-1 --output="$folder/log/array-%a" scripts/slurm/sweep_array.sbatch \
        "$folder/records/sweep" time "${small[@]}" --attention naive sdpa_math --mode forward train-step
done
grep "2 cells are recorded already" "$folder"/log/array-{0,1}
RANKS_PER_NODE=1 sbatch --wait --nodes=1 --ntasks=2 --ntasks-per-node=2 --output="$folder/log/ranks" \
    scripts/slurm/multi_node.sbatch "$folder/records/ranks" \
    parallel --world-size 2 --strategy ddp_flat ddp_bucketed --with "" "${small[@]}"
cat "$folder"/records/sweep/part-*/records.jsonl > "$folder/records/sweep/records.jsonl"
for run in sweep ranks; do
    python -m cs_systems report "$folder/records/$run" --format markdown
done
cells=$(cat "$folder"/records/{sweep,ranks}/records.jsonl | wc -l)
ok=$(cat "$folder"/records/{sweep,ranks}/records.jsonl | grep -c '"status":"ok"')
echo "$ok of $cells cells are ok"
[ "$ok" -eq 7 ] && [ "$cells" -eq 7 ]

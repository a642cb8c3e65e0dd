#!/bin/sh
# odd.sh MODE [ARG]: an agent that misbehaves as MODE says, for tests. With HOLD=FIFO in its environment it and all its
# children keep that fifo open for writing, so that its reader sees the end when the last of them is dead.
if [ -n "$HOLD" ]; then
	exec 9>"$HOLD"
	echo held >&9
fi

ask() { # reads a request; sets id, quoted as it came
	IFS= read -r line || return 1
	id=${line#'{"id":'} id=${id%%',"tenant":'*}
}
say() { printf '%s\n' "$1"; }
ok() { say '{"id":'"$id"',"events":[{"type":"pid","data":'$$'}]}'; }
serve() { while ask; do ok; done; }
hang() { say '{"log":"in hand"}'; exec sleep 1000; }

case $1 in
ok) serve ;;
once) ask && ok ;;
silent) ask && hang ;;
deaf) hang ;;
leaves) ask && ok && ask && say '{"log":"in hand"}' && cat ;; # without an answer to the second
last) ask && say '{"log":"in hand"}' && cat && ok ;; # answers at the end of its stdin
flaky) ask && case $line in *'"attempt":1'*) hang ;; *) ok; serve ;; esac ;;
stopped) ask && kill -STOP $$ ;;
say) while ask; do say '{"id":'"$id,$2"'}'; done ;; # ARG: the rest of every reply
garbage) ask && say 'Traceback (most recent "call" last)' && serve ;;
long) ask && head -c 33554433 /dev/zero | tr '\0' x && echo && serve ;;
noend) ask && printf '{"id":%s}' "$id" ;;
crash) ask && echo 'first line' >&2 && echo 'boom: it "broke"' >&2 && exit 3 ;;
banner) say 'Loading the model' && serve ;;
then) # ARG: a command to run after each reply, told to the test by a log line
	while ask; do
		ok
		eval "$2"
	done
	;;
stale) while ask; do
	say '{"id":"other","heartbeat":true}'
	say '{"id":"other","foo":1}'
	ok
	ok
done ;;
beats) # ARG: how many, a quarter of a second apart
	while ask; do
		i=0
		while [ $i -lt "$2" ]; do
			i=$((i + 1))
			say '{"id":'"$id"',"heartbeat":true}'
			sleep 0.25
		done
		ok
	done
	;;
floods) # on both streams, before it reads and before it answers
	flood() {
		head -c 1000000 /dev/zero | tr '\0' e >&2
		echo >&2
		yes '{"log":"flood"}' | head -n 20000
	}
	flood
	while ask; do
		flood
		ok
	done
	;;
forks) # a grandchild that keeps the pipes open
	sleep 1000 &
	serve
	;;
forks-stubborn) # a grandchild that ignores TERM
	(trap '' TERM && say '{"log":"ignoring"}' && while :; do sleep 0.05; done) &
	serve
	;;
forks-silent)
	sleep 1000 &
	ask && hang
	;;
stubborn) # ignores the end of its stdin, and TERM
	trap '' TERM
	ask && ok
	say '{"log":"ignoring"}'
	while :; do sleep 0.05; done
	;;
polite) # needs TERM, and takes it
	trap 'say "{\"log\":\"TERM\"}"; exit 0' TERM
	ask && ok
	while :; do sleep 0.05; done
	;;
*)
	echo "odd.sh: no mode $1" >&2
	exit 2
	;;
esac

// Postrider runs agents and carries what they decided to the rest of the world over MQTT, also when the broker has been
// away for days. This file joins the parts: the commands, their exit codes, and what runs beside what in one process.
package main

import (
	"cmp"
	"context"
	_ "embed"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/oklog/run"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"

	"postrider/executor"
	"postrider/fold"
	"postrider/internal/agent"
	"postrider/internal/cli"
	"postrider/internal/demo"
	"postrider/internal/devbroker"
	"postrider/internal/httpapi"
	"postrider/internal/kind"
	"postrider/internal/mqtt"
	"postrider/internal/record"
	"postrider/internal/sqlite"
	"postrider/outbox"
	"postrider/relay"
)

//go:embed schema.sql
var schema string

func main() { os.Exit(postrider()) }

// postrider runs the command that the arguments name and returns the exit code.
func postrider() int {
	app := &cli.App{Schema: schema, Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr}
	p := process{app}
	root := app.Root(
		app.Demo(untilSignal(p.demo)),
		app.Dev(untilSignal(p.serve)),
		app.Serve(untilSignal(p.serve)),
		app.Relay(untilSignal(p.relay)),
		app.Send(),
		app.Runs(untilSignal[cli.Tail]),
		app.Rewind(),
		app.Inbox(),
		app.Outbox(),
		app.Fold(untilSignal(p.fold)),
		app.Version(),
	)
	err := app.Execute(context.Background(), root)
	if err == nil {
		return 0
	}
	code, hint := ending(err)
	app.PrintError(err, cmp.Or(cli.HintOf(err), hint))
	return code
}

const (
	exitFailure     = 1
	exitUsage       = 2
	exitNotFound    = 3 // or a database that cannot be used
	exitConflict    = 4
	exitUnreachable = 5
	exitTryLater    = 6
	exitTimeout     = 124
)

var errOtherNode = errors.New("the database of another node")

// endings has the exit code of each error that means something to a caller, and what the reader can do where the command
// does not know better. The first match counts.
var endings = []struct {
	err  error
	code int
	hint string
}{
	{executor.ErrInvalid, exitUsage, ""},
	{sqlite.ErrNotFound, exitNotFound, "postrider dev and postrider serve make a database; --db FILE names another one"},
	{sqlite.ErrAccess, exitNotFound, "it takes write access to the file, to those beside it (-wal, -shm) and to their folder, also for reading"},
	{sqlite.ErrForeign, exitNotFound, "--db FILE names the database"},
	{sqlite.ErrGone, exitNotFound, "put the file back and start again; what was sent meanwhile is lost"},
	{sqlite.ErrNewer, exitNotFound, "use the version of postrider that wrote it, or a later one"},
	{sqlite.ErrOlder, exitNotFound, "starting its node, or its fold, upgrades it"},
	{demo.ErrBroken, exitFailure, "--keep leaves both databases to look into"},
	{executor.ErrNotFound, exitNotFound, ""},
	{fold.ErrNotFound, exitNotFound, ""},
	{os.ErrNotExist, exitNotFound, ""},
	{kind.ErrNoProgram, exitNotFound, "a program is looked for in PATH, or by its path from here; chmod +x makes one of a script"},
	{sqlite.ErrLocked, exitConflict, "end that process first, or choose another database with --db FILE"},
	{fold.ErrOtherName, exitConflict, "leave --name out, or choose another database with --db FILE"},
	{errOtherNode, exitConflict, "leave --node out, or choose another database with --db FILE"},
	{executor.ErrConflict, exitConflict, ""},
	{syscall.EADDRINUSE, exitConflict, "is another postrider dev running? --mqtt 127.0.0.1:0 takes a free port"},
	{syscall.EADDRNOTAVAIL, exitUsage, "an address to listen on is one of this machine's, such as 127.0.0.1:0"},
	{mqtt.ErrUnreachable, exitUnreachable, "does the broker run at this address?"},
	{sqlite.ErrBusy, exitTryLater, "try again"},
	{sqlite.ErrFull, exitTryLater, "make room, and try again"},
	{context.DeadlineExceeded, exitTimeout, ""},
}

func ending(err error) (code int, hint string) {
	if _, ok := errors.AsType[*cli.UsageError](err); ok {
		return exitUsage, ""
	}
	for _, e := range endings {
		if errors.Is(err, e.err) {
			return e.code, e.hint
		}
	}
	return exitFailure, ""
}

// shutdownLimit bounds an orderly end, whatever a broker, an agent or a disk does.
const shutdownLimit = 10 * time.Second

// lastCall is how long dev's fold goes on after the relay. What it misses is shipped again at the next start.
const lastCall = 300 * time.Millisecond

// another says that s, which came so long after the first signal, is a second one. timeout(1) sends one to its child, and
// the same to the group that the child is in.
func another(first, s os.Signal, after time.Duration) bool {
	return s != first || after > 200*time.Millisecond
}

// untilSignal gives a command that runs until it is told to end an orderly end: the first SIGINT, SIGTERM or SIGHUP ends its
// context, the second ends the process at once. Other commands die of the first: all they write is one transaction.
func untilSignal[T any](command func(context.Context, T) error) func(context.Context, T) error {
	return func(ctx context.Context, o T) error {
		ctx, cancel := context.WithCancel(ctx)
		defer cancel()
		// Not the default effect for the second one: a shell starts what it puts into the background with SIGINT ignored.
		signals := make(chan os.Signal, 2)
		signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
		if !signal.Ignored(syscall.SIGHUP) { // nohup means it
			signal.Notify(signals, syscall.SIGHUP)
		}
		go func() {
			first, at := <-signals, time.Now()
			cancel()
			limit := time.After(shutdownLimit)
			for again := false; !again; {
				select {
				case s := <-signals:
					again = another(first, s, time.Since(at))
				case <-limit:
					fmt.Fprintf(os.Stderr, "postrider: the end took longer than %s\n", shutdownLimit)
					again = true
				}
			}
			os.Exit(exitFailure)
		}()
		err := command(ctx, o)
		if ctx.Err() != nil && errors.Is(err, context.Canceled) {
			err = nil // told to end before it had begun
		}
		return err
	}
}

// process has one method for each command that goes on until it is told to end.
type process struct{ app *cli.App }

// serve runs a node until ctx ends:
//
//	 send, rewind (other processes)
//	       │ rows, found by poll
//	┌──────▼────────────── one SQLite file ───────────────────┐
//	│ runs, inbox, checkpoints                         outbox │
//	└──▲──────────────────────────────────────────────────▲───┘
//	   │ each step in one transaction                     │ drain, ack            (dev: in this process)
//	┌──┴───────┐   Notify: a bell, nothing else   ┌───────┴──┐  QoS 1  ┌────────┐  events  ┌──────┐
//	│ executor ├──────────────────────────────────▶  relay   ├─────────▶ broker ├──────────▶ fold │
//	└──▲───────┘                                  └──────────┘         └────────┘          └──┬───┘
//	   │ steps, effects                                                           its own SQLite file
//	┌──▼─────┐
//	│ agents │
//	└────────┘
//
// Actors of the group are the executor, the relay, the fold, and what answers over HTTP. The relay's place returns only when
// interrupted, whatever becomes of its sessions, and the fold's after the relay's; an executor that ends takes all with it.
// The agents end after the executor returned, the stores after all actors, dev's broker last.
func (p process) serve(ctx context.Context, n cli.Node) (err error) {
	log := p.app.Log
	agents, err := host(n, log)
	if err != nil {
		return err
	}
	token, err := readToken(n.TokenFile)
	if err != nil {
		return err
	}
	web, err := p.listen(n.Listen)
	if err != nil {
		return err
	}
	defer web.close()
	if n.Embedded != "" {
		broker, err := devbroker.Start(n.Embedded, log)
		if err != nil {
			return err
		}
		defer broker.Close()
		n.Broker = broker.URL()
	}
	if err := checkBroker(n.Broker, n.NoRelay); err != nil {
		return err
	}
	if err := checkRoutes(n, cmp.Or(n.Name, n.NewName)); err != nil {
		return err // before a database is made
	}
	node, err := openNode(ctx, n, log, web.metrics)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, node.close()) }()
	if err := checkRoutes(n, node.id.Name); err != nil {
		return err
	}
	var events *foldStore // dev only
	var sub *fold.Subscriber
	if n.FoldDB != "" {
		if events, err = openFold(ctx, n.FoldDB, "", log, web.metrics, nil); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, events.close()) }()
		sub, err = fold.NewSubscriber(events.Fold, fold.SubscriberOptions{Broker: mqtt.Options{Broker: n.Broker}, Topics: n.Topics})
		if err != nil {
			return err
		}
		if err := sub.Announce(ctx); err != nil {
			return err // the relay may be faster than the fold
		}
		// The broker that the last process had took with it what it had not delivered yet.
		again, err := outbox.New(node.store, node.id.Name).Reship(ctx, func(ctx context.Context, key record.BranchKey) (int64, error) {
			return events.Held(ctx, node.id.Name, key)
		})
		if err != nil {
			return err
		}
		if again > 0 {
			log.Info("shipping again what did not arrive before the last end", "records", again)
		}
	}

	var g run.Group
	web.check("store", func(ctx context.Context) (string, error) { return "", node.store.Health(ctx) })
	notify := func() {}
	var take relay.Receive // what becomes of what the relay receives; set below, before anything runs

	shipping, shipped := context.WithCancel(context.WithoutCancel(ctx)) // ends when the relay has returned
	defer shipped()
	if !n.NoRelay {
		r := node.relay(n.Broker, n.Topics, n.Inlets, func(ctx context.Context, in []record.Inbound) ([]record.Outcome, error) {
			return take(ctx, in)
		}, log, web)
		notify = r.Notify
		ctx, cancel := context.WithCancel(ctx)
		g.Add(func() error { defer shipped(); return r.Run(ctx) }, func(error) { cancel() })
	}
	{
		e := executor.New(node.store, node.id.Name, agents.hosted(), executor.Options{
			Workers: n.Workers, MaxAttempts: n.MaxAttempts, DeadLetter: n.DeadLetter, MaxContinue: n.MaxContinue, MaxRecord: n.MaxRecord,
			DedupWindow: n.DedupWindow, Routes: n.Routes, Topics: n.Topics, Notify: notify, Logger: log, Metrics: web.metrics,
		})
		web.metrics.MustRegister(e, outbox.New(node.store, node.id.Name))
		web.check("executor", func(context.Context) (string, error) { return "", e.Health() })
		web.inputs = &httpapi.Inputs{Node: inlet{node.store, e}, Token: token}
		ready := false // take is called by one goroutine
		take = func(ctx context.Context, in []record.Inbound) ([]record.Outcome, error) {
			if !ready { // until the agents are written down, their inputs would be dead letters
				if err := e.Health(); err != nil {
					return nil, err
				}
				ready = true
			}
			out, err := executor.Receive(ctx, node.store, in)
			if err == nil {
				e.Wake()
			}
			return out, err
		}
		ctx, cancel := context.WithCancel(ctx)
		g.Add(func() error { return errors.Join(e.Run(ctx), agents.close()) }, func(error) { cancel() })
	}
	if sub != nil {
		web.check("fold", func(ctx context.Context) (string, error) {
			if err := events.Health(ctx); err != nil {
				return "", err
			}
			return sub.Health()
		})
		g.Add(guard(ctx, events.Check))
		// The relay is told to end, the fold follows: the broker forgets what the fold has not taken in by its own end.
		ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
		context.AfterFunc(shipping, func() { time.AfterFunc(lastCall, cancel) })
		g.Add(func() error { return sub.Run(ctx) }, func(error) {})
	}
	g.Add(guard(ctx, node.store.Check))
	web.actor(&g)
	log.Info("node runs", "node", node.id.Name, "db", n.DB, "agents", strings.Join(slices.Sorted(maps.Keys(agents)), ","), "http", web.addr())
	if events != nil {
		log.Info("to try it, run this in another terminal", "command", example(n))
	}
	return g.Run()
}

// demo shows what all of this is for. When nobody reads on, it is told so by an error, and can clean up.
func (p process) demo(ctx context.Context, d cli.Demo) error {
	signal.Ignore(syscall.SIGPIPE)
	return demo.Run(ctx, demo.Options{Schema: schema, Out: p.app.Stdout, Self: self(), JSON: d.JSON, Plain: d.Plain, Keep: d.Keep, Log: p.app.Log})
}

// relay ships the records of a node that serve --no-relay runs, or that is stopped.
func (p process) relay(ctx context.Context, o cli.Relay) (err error) {
	if err := checkBroker(o.Broker, false); err != nil {
		return err
	}
	web, err := p.listen(o.Listen)
	if err != nil {
		return err
	}
	defer web.close()
	store, id, err := openStore(ctx, o.DB, "", p.app.Log, web.metrics)
	if err != nil {
		return err
	}
	node := &node{store: store, id: id, db: o.DB}
	defer func() { err = errors.Join(err, node.close()) }()
	p.app.Log.Info("relay runs", "node", id.Name, "db", o.DB, "broker", shown(o.Broker), "http", web.addr())
	var g run.Group
	g.Add(guard(ctx, store.Check))
	web.metrics.MustRegister(outbox.New(store, id.Name))
	web.check("store", func(ctx context.Context) (string, error) { return "", store.Health(ctx) })
	ready := false // take is called by one goroutine
	take := func(ctx context.Context, in []record.Inbound) ([]record.Outcome, error) {
		if !ready { // started before its node, it leaves inputs at the broker
			if err := executor.Registered(ctx, store); err != nil {
				return nil, err
			}
			ready = true
		}
		return executor.Receive(ctx, store, in) // the node finds them by its poll
	}
	r := node.relay(o.Broker, o.Topics, o.Inlets, take, p.app.Log, web)
	web.actor(&g)
	ctx, cancel := context.WithCancel(ctx)
	g.Add(func() error { return r.Run(ctx) }, func(error) { cancel() })
	return g.Run()
}

// fold counts what nodes ship.
func (p process) fold(ctx context.Context, o cli.Fold) (err error) {
	if err := checkBroker(o.Broker, false); err != nil {
		return err
	}
	web, err := p.listen(o.Listen)
	if err != nil {
		return err
	}
	defer web.close()
	f, err := openFold(ctx, o.DB, o.Name, p.app.Log, web.metrics, web.metrics)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.close()) }()
	sub, err := fold.NewSubscriber(f.Fold, fold.SubscriberOptions{Broker: mqtt.Options{Broker: o.Broker}, Topics: o.Topics,
		Logger:     p.app.Log.With("broker", shown(o.Broker)),
		Partitions: o.Partitions, Tenant: o.Tenant})
	if err != nil {
		return err
	}
	p.app.Log.Info("fold runs", "fold", f.Name(), "db", o.DB, "broker", shown(o.Broker), "http", web.addr())
	var g run.Group
	g.Add(guard(ctx, f.Check))
	web.check("store", func(ctx context.Context) (string, error) { return "", f.Health(ctx) })
	web.check("fold", func(context.Context) (string, error) { return sub.Health() })
	web.actor(&g)
	ctx, cancel := context.WithCancel(ctx)
	g.Add(func() error { return sub.Run(ctx) }, func(error) { cancel() })
	return g.Run()
}

// inlet is where inputs over HTTP go: into the store, and the executor looks for them at once.
type inlet struct {
	store    *sqlite.Store
	executor *executor.Executor
}

func (i inlet) Submit(ctx context.Context, in executor.Input) (executor.Submitted, error) {
	out, err := executor.Submit(ctx, i.store, in)
	switch {
	case err == nil:
		i.executor.Wake()
	case errors.Is(err, executor.ErrNotFound) && i.executor.Health() != nil: // perhaps it has not written down its agents yet
		err = httpapi.ErrNotReady
	}
	return out, err
}

func (i inlet) FindInput(ctx context.Context, tenant, run, id string) (executor.InputInfo, error) {
	return executor.FindInput(ctx, i.store, tenant, run, id)
}

// readToken reads the token of --token-file, nil for none.
func readToken(file string) (*httpapi.Token, error) {
	if file == "" {
		return nil, nil
	}
	token, err := httpapi.ReadToken(file)
	switch {
	case errors.Is(err, os.ErrNotExist):
		return nil, fmt.Errorf("--token-file: %w", err)
	case err != nil:
		return nil, cli.WithHint(cli.Usagef("--token-file: %w", err), "it has one line of at least 16 printable characters, and mode 0600 or 0640")
	}
	return token, nil
}

// web is what a process shows of itself over HTTP: the metrics of its parts, and checks of each of them.
type web struct {
	metrics *prometheus.Registry
	inputs  *httpapi.Inputs // nil: it takes none
	checks  []httpapi.Check
	server  *httpapi.Server // nil: it shows nothing
}

// listen takes the address before anything is made, so that a taken one leaves nothing behind.
func (p process) listen(addr string) (*web, error) {
	w := &web{metrics: prometheus.NewRegistry()}
	w.metrics.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	if addr == "" {
		return w, nil
	}
	server, err := httpapi.Listen(addr, p.app.Log)
	if errors.Is(err, syscall.EADDRINUSE) {
		err = cli.WithHint(err, "--listen 127.0.0.1:0 takes a free port, --listen off none")
	}
	if err != nil {
		return nil, err
	}
	w.server = server
	return w, nil
}

func (w *web) addr() string {
	if w.server == nil {
		return "off"
	}
	return w.server.Addr()
}

func (w *web) check(name string, ask func(ctx context.Context) (trouble string, err error)) {
	w.checks = append(w.checks, httpapi.Check{Name: name, Ask: ask})
}

// actor answers for as long as the group runs.
func (w *web) actor(g *run.Group) {
	if w.server == nil {
		return
	}
	ctx, cancel := context.WithCancel(context.Background())
	g.Add(func() error { return w.server.Run(ctx, w.metrics, w.inputs, w.checks...) }, func(error) { cancel() })
}

// close gives back the address of a process that ended before its group ran.
func (w *web) close() {
	if w.server != nil {
		_ = w.server.Close()
	}
}

// node is an open node database, and the lock of the one process that runs it.
type node struct {
	store *sqlite.Store
	id    sqlite.Node
	db    string
	lock  *sqlite.Lock // nil for a relay
}

func openNode(ctx context.Context, n cli.Node, log *slog.Logger, metrics prometheus.Registerer) (*node, error) {
	// Where the file is missing and its node runs, another one must not be made.
	if _, err := os.Stat(n.DB); errors.Is(err, os.ErrNotExist) && exists(canonical(n.DB)+".node") {
		lock, err := takeLock(n.DB, "node")
		if err != nil {
			return nil, err
		}
		if err := lock.Release(); err != nil {
			return nil, err
		}
	}
	store, id, err := openStore(ctx, n.DB, cmp.Or(n.Name, n.NewName), log, metrics)
	if errors.Is(err, sqlite.ErrNotFound) && n.Name == "" && n.NewName == "" {
		return nil, cli.WithHint(&cli.UsageError{Err: err}, "the first start makes the database and needs --node NAME")
	}
	if err != nil {
		return nil, err
	}
	if n.Name != "" && n.Name != id.Name {
		return nil, errors.Join(fmt.Errorf("%s is %w: %s, not %s", n.DB, errOtherNode, id.Name, n.Name), store.Close())
	}
	lock, err := takeLock(n.DB, "node")
	if err != nil {
		return nil, errors.Join(err, store.Close())
	}
	return &node{store, id, n.DB, lock}, nil
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// openStore opens a node database. One that is missing is made for the node newName; "" makes none.
func openStore(ctx context.Context, db, newName string, log *slog.Logger, metrics prometheus.Registerer) (*sqlite.Store, sqlite.Node, error) {
	store, err := sqlite.Open(ctx, db, sqlite.NodeSchema(schema, newName, db), sqlite.Options{Create: newName != "", Logger: log, Metrics: metrics})
	if err != nil {
		return nil, sqlite.Node{}, err
	}
	id, err := sqlite.ReadNode(ctx, store)
	if err != nil {
		return nil, sqlite.Node{}, errors.Join(err, store.Close())
	}
	return store, id, nil
}

// guard is an actor that ends the process when its database is removed or replaced, as check says: all it did would go
// nowhere, and a fold would acknowledge what it has not.
func guard(ctx context.Context, check func() error) (execute func() error, interrupt func(error)) {
	ctx, cancel := context.WithCancel(ctx)
	return func() error {
		tick := time.NewTicker(2 * time.Second)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return nil
			case <-tick.C:
			}
			if err := check(); err != nil {
				return err
			}
		}
	}, func(error) { cancel() }
}

func (n *node) close() error {
	err := n.store.Close()
	if n.lock != nil {
		err = errors.Join(err, n.lock.Release())
	}
	return err
}

// relay ships and forwards what leaves the node, and gives what comes for it to take.
func (n *node) relay(broker string, topics record.Topics, in record.Inlets, take relay.Receive, log *slog.Logger, web *web) *relay.Relay {
	o := mqtt.Options{Broker: broker, ClientID: n.id.ClientID}
	dial := func(ctx context.Context) (relay.Conn, error) {
		c, err := mqtt.Dial(ctx, o)
		if err != nil {
			return nil, err // not c: a nil *mqtt.Client would be a Conn that is not nil
		}
		return c, nil
	}
	log = log.With("broker", shown(broker))
	box := outbox.New(n.store, n.id.Name)
	in.Node = n.id.Name
	receiving := o
	receiving.ClientID += "-in"
	receiver := relay.NewReceiver(box, &in, receiving, take, relay.ReceiverOptions{Logger: log, Metrics: web.metrics})
	r := relay.New(box, topics, dial, relay.Options{Logger: log, Metrics: web.metrics, Receiver: receiver, Forward: executor.NewForwarder(n.store, n.id).Forward})
	web.check("relay", func(context.Context) (string, error) { return r.Health() })
	web.check("inbound", func(context.Context) (string, error) { return receiver.Health() })
	return r
}

// foldStore is an open fold database, and the lock of the one process that subscribes for it: two with one client id
// would cut each other off for ever.
type foldStore struct {
	*fold.Fold
	lock *sqlite.Lock
}

// openFold opens a fold's database, which is made when it is missing. store takes the metrics of the file, where it is the
// only one of its process.
func openFold(ctx context.Context, db, name string, log *slog.Logger, metrics, store prometheus.Registerer) (*foldStore, error) {
	f, err := fold.Open(ctx, db, fold.Options{Name: name, Metrics: metrics, Store: sqlite.Options{Create: true, Logger: log, Metrics: store}})
	if err != nil {
		return nil, err
	}
	lock, err := takeLock(db, "fold")
	if err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return &foldStore{f, lock}, nil
}

func (f *foldStore) close() error { return errors.Join(f.Close(), f.lock.Release()) }

// takeLock takes the lock file beside a database that the one process of a kind holds.
func takeLock(db, what string) (*sqlite.Lock, error) {
	host, err := os.Hostname()
	if err != nil {
		host = "?"
	}
	l, err := sqlite.TakeLock(canonical(db)+"."+what, fmt.Sprintf("%d@%s", os.Getpid(), host))
	if errors.Is(err, sqlite.ErrLocked) {
		err = fmt.Errorf("%s has a running %s: %w", db, what, err)
	}
	return l, err
}

// canonical is the one name of a file that all its links share: locks must exclude each other by any of them.
func canonical(path string) string {
	if real, err := filepath.EvalSymlinks(path); err == nil {
		return real
	}
	if dir, err := filepath.EvalSymlinks(filepath.Dir(path)); err == nil {
		return filepath.Join(dir, filepath.Base(path))
	}
	return path
}

// checkRoutes refuses a route that leads to the node it is given to.
func checkRoutes(n cli.Node, node string) error {
	for _, agent := range slices.Sorted(maps.Keys(n.Routes)) {
		if n.Routes[agent].Node == node {
			return cli.Usagef("--route %s=%s names this node itself", agent, node)
		}
	}
	return nil
}

// checkBroker refuses an address that no session could ever be had with.
func checkBroker(url string, none bool) error {
	if none {
		return nil
	}
	if _, err := mqtt.ParseBroker(url); err != nil {
		return &cli.UsageError{Err: err}
	}
	return nil
}

// shown is a broker's address without its password, and without a query, which may be one too.
func shown(broker string) string {
	u, err := mqtt.ParseBroker(broker)
	if err != nil {
		return "?"
	}
	u.RawQuery = ""
	return u.Redacted()
}

// agents are the agents of a node by name.
type agents map[string]kind.Hosted

func host(n cli.Node, log *slog.Logger) (agents, error) {
	all := agents{}
	for _, s := range n.Agents {
		name, what, spec, err := kind.ParseSpec(s)
		if err != nil {
			return nil, &cli.UsageError{Err: err}
		}
		if all[name] != nil {
			return nil, cli.Usagef("agent %s is given twice", name)
		}
		all[name], err = kind.New(what, name, spec, kind.ExecOptions{Procs: n.Procs, StepTimeout: n.StepTimeout, Logger: log})
		if errors.Is(err, kind.ErrNoProgram) {
			return nil, err
		}
		if err != nil {
			return nil, &cli.UsageError{Err: err}
		}
	}
	return all, nil
}

func (a agents) hosted() map[string]agent.Agent {
	m := make(map[string]agent.Agent, len(a))
	for name, h := range a {
		m[name] = h
	}
	return m
}

// close ends the agents side by side. No step is in hand any more. What is left of shutdownLimit is enough: the executor
// takes 2 s for steps to end and 2 s to kill the others.
func (a agents) close() error {
	ctx, cancel := context.WithTimeout(context.Background(), shutdownLimit/2)
	defer cancel()
	errs := make(chan error, len(a))
	for _, h := range a {
		go func() { errs <- h.Close(ctx) }()
	}
	var err error
	for range a {
		err = errors.Join(err, <-errs)
	}
	return err
}

// self is how this program was called.
func self() string {
	if strings.Contains(filepath.ToSlash(os.Args[0]), "/go-build") {
		return "go run ."
	}
	return "postrider"
}

// example is a command that gives the first agent an input.
func example(n cli.Node) string {
	name, _, _ := strings.Cut(n.Agents[0], "=")
	c := self() + " send " + name + " run-1"
	if n.DB != "postrider.db" {
		c += " --db " + n.DB
	}
	return c
}

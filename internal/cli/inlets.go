package cli

import (
	"github.com/spf13/pflag"

	"postrider/internal/record"
)

// inletFlags are those that say what comes in over MQTT.
type inletFlags struct{ public, subscribe []string }

func (i *inletFlags) flags(f *pflag.FlagSet) {
	f.StringArrayVar(&i.public, "public", nil, "take inputs from anybody for `AGENT`, on its topic …/agents/AGENT/inbox; may be repeated")
	f.StringArrayVar(&i.subscribe, "subscribe", nil, "take what comes on other topics, `FILTER=AGENT[/RUN]`; {1} in RUN is level 1 of the topic, the first is {0}; may be repeated")
}

// inlets is what the flags say. The node is not known yet.
func (i *inletFlags) inlets(topics record.Topics) (record.Inlets, error) {
	in := record.Inlets{Topics: topics, Node: "node", Public: i.public}
	for _, s := range i.subscribe {
		r, err := record.ParseRule(s)
		if err != nil {
			return record.Inlets{}, Usagef("--subscribe: %w", err)
		}
		in.Rules = append(in.Rules, r)
	}
	if err := in.Check(); err != nil {
		return record.Inlets{}, &UsageError{Err: err}
	}
	return in, nil
}

// known refuses agents that no input could ever reach.
func known(in record.Inlets, hosted func(agent string) bool) error {
	agents := in.Public
	for _, r := range in.Rules {
		agents = append(agents[:len(agents):len(agents)], r.Agent)
	}
	for i, a := range agents {
		flag := "--public"
		if i >= len(in.Public) {
			flag = "--subscribe"
		}
		if !hosted(a) {
			return WithHint(Usagef("%s: agent %s is neither hosted here nor has a route", flag, a),
				"--agent %[1]s=KIND:SPEC hosts it, --route %[1]s=NODE has its inputs handed over", a)
		}
	}
	return nil
}

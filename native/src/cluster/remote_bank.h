// Experts that other servers compute: who has which, and the rows that are sent there.
//
// What no file here has waits for a server that has it, as long as one may come: a few seconds from when it was wanted,
// and from when something was placed or lost.
//
// All rows of an expert in a ubatch are computed in one place, here or there: kernels depend on how many there are. Of
// the servers that have an expert and are there, the one gets it that is expected to have answered first. A server that is
// lost has no experts until it joins again: those that no other one has are computed here meanwhile.

#pragma once

#include "base/mutex.h"
#include "cluster/peer.h"
#include "residency/tier.h"

#include <memory>

namespace pyorch {

// The slots of a ubatch that one server computes.
struct RemoteRows {
    std::vector<int>        slots;       // ascending, of [n_tokens][n_used]
    std::shared_ptr<Frame>  frame;       // that asks for them
    std::shared_ptr<Answer> answer;      // null: it is not asked yet
    int                     peer   = -1; // its number; -1: nobody is asked
    std::vector<int>        failed = {}; // numbers of those that cannot, or were lost for too long
    Clock::time_point       until  = {}; // servers that come are waited for; unset: it has not failed yet
};

// How long experts of a layer would be read from the own disk, in seconds; unknown: they are not.
struct ReadCost {
    double queued = 0; // before they are
    double expert = 0; // each; 0: unknown
    double busy   = 0; // share of the time in which layers of this server lately waited for that disk

    bool known() const { return expert > 0; }
};

class RemoteBank : public Tier {
public:
    // lacking: by layer and expert, nonzero for those that no file here has; empty: none. patience: how long these wait
    // for a server that has them.
    explicit RemoteBank(std::vector<LayerShape> of_layers, std::vector<std::vector<uint8_t>> lacking = {},
        std::chrono::milliseconds patience = std::chrono::seconds(5));
    ~RemoteBank() override;

    RemoteBank(const RemoteBank &)             = delete;
    RemoteBank & operator=(const RemoteBank &) = delete;

    const std::vector<LayerShape> layers;

    // elsewhere: by expert, nonzero where another server computes it now. Called whenever that may have changed, by any
    // thread; set once, before the first server is connected.
    using Changed = std::function<void(int layer, const std::vector<uint8_t> & elsewhere)>;
    void on_change(Changed changed);

    // The number of a server, from 0. Throws Failure where it does not join.
    int  connect(const PeerConfig & config);
    void disconnect(int peer);

    std::shared_ptr<Peer> peer(int number); // throws Failure

    // [n_expert][n_places]: the numbers of the servers that can compute each expert; -1 ends a list, and where it is
    // empty, this one does.
    void place(int layer, const std::vector<int> & peers, int n_places);

    // Whether any expert has another place, or needs one.
    bool active() const { return lacks_any || is_active; }

    // Sends the slots of a ubatch [n_tokens][n_used] that others compute, and marks their experts.
    // inputs: [n_tokens][n_in]; here: by expert, nonzero for those that are computed here whatever their place. Of what
    // a server would take longer to answer than it takes to read its experts, nothing is sent.
    std::vector<RemoteRows> send(int layer, int n_tokens, int n_used, const int32_t * experts, const float * weights,
        const float * inputs, const std::vector<uint8_t> & here, const ReadCost & read,
        std::vector<uint8_t> & elsewhere);

    // What a server did not answer, and cannot be computed here, for others that have its experts, or for the same one
    // when it is back: none is asked yet. Waits for one that may come. Empty where it can, and where nobody has them.
    std::vector<RemoteRows> send_again(int layer, const RemoteRows & lost);

    // Until the answer is there; asks for it where that was not done yet. False: it failed.
    bool wait(int layer, RemoteRows & rows);

    // Whether an expert that another server has may be read here; not until told.
    void allow_reads(bool allowed) { may_read = allowed; }
    bool reads_allowed() const { return may_read; }

    // The next ubatch is a trial, whose outputs nobody wants, unless something was placed before it.
    void expect_trial() { is_trial = true; }
    bool take_trial() { return is_trial && is_trial.exchange(false); }

    // mask[n_expert]: becomes 1 for each expert of the layer that another server computes now.
    void mark(int layer, std::vector<uint8_t> & mask) override;

    pyorch_remote_counts counts();
    void                 waited(uint64_t ns, uint64_t n_fallback);

private:
    const std::vector<std::vector<uint8_t>>    lacking;
    const bool                                 lacks_any;
    const std::chrono::milliseconds            patience;
    std::atomic<bool>                          is_active{ false };
    std::atomic<bool>                          may_read{ false };
    std::atomic<bool>                          is_trial{ false };
    Mutex                                      mutex;
    CondVar                                    arrived; // somebody joined, or something was placed
    std::vector<std::shared_ptr<Peer>>         peers GUARDED_BY(mutex);
    std::vector<std::vector<std::vector<int>>> placement GUARDED_BY(mutex);      // by layer and expert; none: here
    Clock::time_point                          placed_at GUARDED_BY(mutex) = {}; // last
    pyorch_remote_counts                       counters GUARDED_BY(mutex)  = {};

    Mutex   telling; // so that nobody is told an older state last
    Changed changed;

    void              tell(int layer);
    void              tell_all();
    bool              computes(int peer) const REQUIRES(mutex) { return peers[peer] && peers[peer]->joined(); }
    bool              lacks(int layer, int expert) const { return !lacking.empty() && lacking[layer][expert]; }
    Clock::time_point last_change() const REQUIRES(mutex);
    std::vector<std::vector<int>> choose(int layer, const std::vector<int> & wanted,
        const std::vector<std::vector<int>> & slots_of, const std::vector<int> & failed,
        std::vector<uint8_t> & is_chosen) const REQUIRES(mutex);
    size_t                        keep_for_reading(int layer, const ReadCost & read, int n_read,
        const std::vector<std::vector<int>> & slots_of, std::vector<std::vector<int>> & experts_at) const
        REQUIRES(mutex);
};

} // namespace pyorch
